"""Ground of the op library: declaration and dispatch, bit patterns, elementary functions, fixed reductions."""
