"""Clippers that do other than shorten each example's gradient by its norm; `base` says what all clippers have in common."""
