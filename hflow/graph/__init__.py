"""The graph of a recipe: frozen specs, their bindings, checks and drawings. It needs no torch and no ray."""
