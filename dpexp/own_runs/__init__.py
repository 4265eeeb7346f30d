"""Pages about a person's own runs: what their files say (`reading`), configurations compared (`comparison`), the `page`."""
