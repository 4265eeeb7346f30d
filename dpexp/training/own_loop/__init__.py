"""`PrivacyEngine`, and what its loop goes through: its arguments, its batches, whose rows they are."""
