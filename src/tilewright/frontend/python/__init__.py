"""Python functions under `@tw.kernel`. In: source of a live function or of a file that is not executed. Out: `tree.syntax`."""
