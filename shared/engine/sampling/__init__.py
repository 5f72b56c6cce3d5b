"""How a step's tokens are sampled on the device: rows, masks, redirects, penalties, and the draw."""
