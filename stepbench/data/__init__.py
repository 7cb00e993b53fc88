"""Built-in data: ordinary LightningDataModules, synthetic or read from real files."""
