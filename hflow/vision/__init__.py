"""Models that see: families of vision-language models, each a folder and a line in `FAMILIES`."""
