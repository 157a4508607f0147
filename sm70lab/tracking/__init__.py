"""What stays of a run: its folder, its MLflow entry, its fingerprint."""
