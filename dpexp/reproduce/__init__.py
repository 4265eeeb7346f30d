"""The papers' tables and figures, regenerated beside their own numbers.

Reading order: `documents` says what a page is made of, and `catalogue` names every page and what makes it. What the papers print
is in `paper`; what was measured goes `records` → `fillings` (the seeds of one configuration) → `pairs` and `statistics` (two of
them, and what they say about a claim). Pages of runs are `tables` (with `cells`: which records fill a printed cell, and which
command would; and `miniature`: grids of settings), `curves` (with `curve_claims`), `benchmarks`, `league`, `methods` and
`thresholds`; pages of arithmetic are `accounting`, `exact`, `complexity_tables`, `hyperparameters` and `figures`; of all of them
speak `coverage` and `overview`. `drawing` makes pictures, and `site` the one page with everything. Words, claims and lists are
data: ``pages.yaml``, ``league.yaml``, ``methods.yaml``, ``goals.yaml`` here, and ``results/paper``.
"""
