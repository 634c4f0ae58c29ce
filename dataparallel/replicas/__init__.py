"""The clones of a module, and what keeps their parameters and buffers as the module has them."""
