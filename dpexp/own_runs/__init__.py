"""Pages about a person's own runs: what their files say (`reading`), configurations compared (`comparison`), with pictures (`page`)."""
