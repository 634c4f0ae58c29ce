"""The wrappers that users see, and the parts of a step around them."""
