"""Rows of data sets, for environments that load them: from local files, strictly, or from the Hugging Face hub."""
