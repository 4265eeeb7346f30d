"""`PrivacyEngine` (`engine`), the run behind it (`planned`, `run`, `checkpoints`), and what its loop goes through (`loop`)."""
