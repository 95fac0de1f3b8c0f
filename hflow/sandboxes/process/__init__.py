"""The sandbox provider `process`: runs tools that are not trusted in processes, and confines these."""
