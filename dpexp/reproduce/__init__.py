"""The papers' tables and figures, regenerated beside their own numbers.

From what was measured to what is said: `records` → `fillings` (the seeds of one configuration) → `pairs` and `statistics` (two of
them, and what they say about a claim) → `tables`, `curves`, `benchmarks`, `league` (a page each) → `documents` → `site`.
"""
