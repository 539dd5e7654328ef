"""Settings: the schema, how its layers are read and checked, and the presets."""
