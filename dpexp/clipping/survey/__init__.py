"""What is proven of a model's graph before anything is summed; `dpexp.clipping.independence` looks at what no gradient shows.

`graph` is the survey: whose rows are whose (`layouts`, by what `observed` sees), and whether a formula gives what autograd gives
(`formula_check`).
"""
