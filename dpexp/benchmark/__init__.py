"""`python -m dpexp.bench` behind the scenes: workloads × methods, each method in a process of its own.

`measure` goes in rounds over the methods, `worker` is one of their processes; `methods` and `workloads` are what can be compared.
"""
