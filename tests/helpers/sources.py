"""Imports as they stand in sources."""

import ast


def imports_of(source: str) -> list[tuple[str, bool]]:
    """(module, at the top of the file) for each import, the string given to import_module included."""
    tree = ast.parse(source)
    later, under_type_checking = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            under_type_checking |= {inner for statement in node.body for inner in ast.walk(statement)}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            later |= set(ast.walk(node))
    found = []
    for node in set(ast.walk(tree)) - under_type_checking:
        if isinstance(node, ast.Import):
            found += [(alias.name, node not in later) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [(f"{node.module}.{alias.name}", node not in later) for alias in node.names]
        elif (
            isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
        ):
            names = [word.value for word in node.args[:1] if isinstance(word, ast.Constant)]
            found += [(name, node not in later) for name in names]
    return sorted(found)
