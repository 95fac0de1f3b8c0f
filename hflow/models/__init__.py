"""What torch code knows of Hugging Face models, whether they are trained or generate."""
