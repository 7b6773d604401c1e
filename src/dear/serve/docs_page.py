"""The page at /docs: the addresses of the service, without a script and without anything from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>dear serve</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code { background: #8882; padding: .1em .3em } td { padding: .2rem 1rem .2rem 0; vertical-align: top }
</style><h1>dear serve</h1>
<p>The same description for programs: <a href="openapi.json">openapi.json</a>.
Images come as multipart field <code>files</code> or as JSON, <code>{"images": ["base64"]}</code>;
a refusal is a status and <code>{"error": {"message": "one sentence"}}</code>.</p>
<p><code>curl -F files=@photo.jpg -F top=3 http://HOST/v1/models/NAME/classify</code></p>
<table>"""


def docs_page(openapi: dict[str, Any]) -> str:
    """HTML of an OpenAPI description."""
    rows, schemas = [], openapi["components"]["schemas"]
    for path, methods in openapi["paths"].items():
        for method, what in methods.items():
            content = what.get("requestBody", {}).get("content", {})
            form = content.get("multipart/form-data", {}).get("schema", {}).get("$ref", "")
            form = schemas.get(form.rpartition("/")[2], {}).get("properties", {})
            fields = ", ".join(f"<code>{escape(name)}</code>" for name in form)
            address = f"<code>{escape(method.upper())} {escape(path)}</code>"
            rows.append(f"<tr><td>{address}<td>{escape(what.get('description', ''))}<br>{fields}")
    return _HEAD + "\n".join(rows) + "</table></html>"
