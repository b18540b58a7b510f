"""Performance ratios with their floors: the store, capture, training and decoding."""
