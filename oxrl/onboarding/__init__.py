"""A model from its name to a verified record: `scout` reads, `repair` corrects small files, `pipeline` verifies."""
