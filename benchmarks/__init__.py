"""Performance ratios with their floors."""
