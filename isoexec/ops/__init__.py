"""HOW each rounding-sensitive op is computed. One folder per family; docs/schedule.md is the law of the bits."""
