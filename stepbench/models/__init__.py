"""Built-in models: ordinary LightningModules, to be measured as any user's module is."""
