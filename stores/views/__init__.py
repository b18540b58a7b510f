"""Views: which samples count, by filters over the index and by statistics of runs."""
