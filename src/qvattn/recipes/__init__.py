"""The recipes that come with the package, one YAML file each; `qvattn.train.recipe.load_recipe` takes their names."""
