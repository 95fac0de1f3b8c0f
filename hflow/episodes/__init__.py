"""An episode and its doors to the world: its engine, its journal, the endpoint."""
