"""PATE: teachers of disjoint parts of the data, and what is asked of their votes. The command is `dpexp.pate`."""
