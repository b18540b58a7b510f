"""Target vision-language models: one file per family, one code path for all."""
