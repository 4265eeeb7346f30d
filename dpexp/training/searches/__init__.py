"""Learning rates and thresholds that are searched for within a step, and paid for; `choice` builds what is configured."""
