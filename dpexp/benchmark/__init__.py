"""`python -m dpexp.bench` behind the scenes: workloads × methods, each method in a process of its own."""
