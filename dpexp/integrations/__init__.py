"""Private training inside of other people's training loops."""
