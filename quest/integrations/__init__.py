"""How to use quest inside other libraries. Each module imports its library; none is imported by `import quest`."""
