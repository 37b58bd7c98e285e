"""One run: config, stages, run folder, resume, result."""
