"""What a run writes for people: metrics, traces, texts of samples."""
