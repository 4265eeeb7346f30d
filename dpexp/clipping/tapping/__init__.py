"""A parameter is followed to the operation where it meets the batch, and that operation is tapped.

Read `sites` (a module gives followed values) → `following` (functions of them are followed) → `meeting`, with `values` and
`copies` (one of them meets the batch) → `taps` (its output passes an identity, `node`, whose backward tells) → `uses` (what was
noticed) → `forwards` (all that was noted of one forward). `roots` are where a back-propagation begins; `dataflow` knows which
tensors come from the batch; `messages` has what is refused.
"""
