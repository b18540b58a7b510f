"""From traffic to a better drafter: harvest, rounds of training on it, deletion."""
