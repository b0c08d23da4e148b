"""A run from its recipe: task and data, composition and checks before anything starts, progress, report."""
