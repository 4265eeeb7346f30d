"""The papers' tables and figures, regenerated beside their own numbers."""
