"""Running a plan: new, resumed, or as twins that are compared."""
