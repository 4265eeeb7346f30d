"""What is proven of a model's graph before anything is summed; `dpexp.clipping.independence` looks at what no gradient shows.

`graph` is the survey: whose rows are whose (`ownership`: in which of the `layouts`, by what `observed` sees, now or, `waiting`,
when sums are formed), and whether a formula gives what autograd gives (`formula_check`).
"""
