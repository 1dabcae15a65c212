"""Programs that make pages, data and models of this repository, and the check of its English."""
