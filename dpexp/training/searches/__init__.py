"""Learning rates and thresholds that are searched for within a step, and paid for; `choice` has the names of a configuration."""
