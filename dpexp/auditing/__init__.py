"""What an attacker finds out about the training data of one run: bounds that can refute a claimed epsilon, never prove it."""
