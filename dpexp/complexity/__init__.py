"""What private training costs on any network: the network by name, its layers, and the formulas of Bu et al."""
