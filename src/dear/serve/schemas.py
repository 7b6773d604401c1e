"""Request and response models: the schemas of `/openapi.json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from pydantic import BaseModel, Field

MOST_LISTED = 10_000  #: entries of any list; `Limits` bounds what a request may really have
_Texts = Annotated[list[str], Meta(max_length=MOST_LISTED)]
_IMAGE = "base64, or a data: URL; other URLs are never fetched"


class ClassifyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON request for classes; multipart requests have the same fields, and images as `files`."""

    images: Annotated[_Texts, Meta(description=_IMAGE)] = []
    top: Annotated[int, Meta(ge=1, description="number of classes to list")] = 5
    classes: Annotated[
        _Texts | None, Meta(description="other classes; + before any name adds all to the trained ones")
    ] = None
    reject: Annotated[bool, Meta(description="mark images that belong to none of the classes")] = False
    certain: Annotated[
        float | None,
        Meta(description="of a tree of classes: least probability of the named node, 0.5 to 1 (null: 0.8)"),
    ] = None


class CompareOptions(ClassifyOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A JSON request for classes by several adapters."""

    models: Annotated[_Texts, Meta(description="names of adapters")] = []


class RetrieveOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON request for similar images of a gallery."""

    images: Annotated[_Texts, Meta(description=_IMAGE)] = []
    top: Annotated[int, Meta(ge=1, description="number of images to list")] = 5
    gallery: Annotated[
        str | None, Meta(description="name of the gallery; may be omitted if there is one")
    ] = None
    by: Annotated[str, Meta(description="features or heads")] = "features"
    attribute: Annotated[str | None, Meta(description="such as color; null: every attribute")] = None


class EmbeddingsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON request for embeddings, as OpenAI's; multipart requests have images as `files`."""

    input: Annotated[
        str | _Texts, Meta(description="a text, a data: URL of an image, or a list of these")
    ] = []
    model: Annotated[str | None, Meta(description="the backbone; there is no other")] = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Meta(description="the length of the backbone's features")] = None
    user: Annotated[str | None, Meta(description="accepted as by OpenAI, and ignored")] = None

    @property
    def inputs(self) -> list[str]:
        """Texts and `data:` URLs."""
        return [self.input] if isinstance(self.input, str) else self.input

    @property
    def images(self) -> list[str]:
        """The `data:` URLs."""
        return [one for one in self.inputs if one.startswith("data:")]

    @property
    def texts(self) -> list[str]:
        """The other inputs."""
        return [one for one in self.inputs if not one.startswith("data:")]


Options = ClassifyOptions | CompareOptions | RetrieveOptions | EmbeddingsOptions


class Reason(BaseModel):
    """Why a request was refused."""

    message: str = Field(description="one sentence")


class Refusal(BaseModel):
    """A request that was refused, in OpenAI's form."""

    error: Reason


class Status(BaseModel):
    """Whether the service answers; the number of adapters and the backbone are for keys."""

    status: Literal["live", "ready"]
    adapters: int | None = None
    backbone: str | None = None


class ModelCard(BaseModel):
    """An adapter."""

    id: str = Field(description="name of the adapter")
    object: Literal["model"] = "model"
    created: int = Field(description="time of training, seconds since 1970")
    owned_by: Literal["dear"] = "dear"
    trained: str = Field(description="time of training, ISO 8601")
    version: str = Field(description="changes when the run changes")
    method: str = Field(description="as `dear methods` lists it")
    classes: list[str] = Field(description="trained classes, in their order")
    labels: Literal["one", "several"] = Field(description="labels that an image may have")
    tree: dict[str, str] = Field(description="parents of classes and of nodes; empty without a tree")
    figures: dict[str, Any] = Field(description="evaluations of the run, by the name of the dataset")


class ModelList(BaseModel):
    """A page of adapters, by name."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool = Field(description="whether another page follows: send the last id as `after`")


class ClassProbability(BaseModel):
    """A class and its probability."""

    name: str
    probability: float


class ClassifiedImage(BaseModel):
    """The classes of one image, or why there are none."""

    image: str = Field(description="name of the file, or `image 1`")
    classes: list[ClassProbability] | None = Field(None, description="most probable first")
    rejected: bool | None = Field(None, description="whether it is none of them; only with `reject`")
    labels: list[str] | None = Field(None, description="all classes that it has, of several labels")
    node: ClassProbability | None = Field(None, description="the deepest certain node of a tree of classes")
    explanation: dict[str, Any] | None = Field(None, description="score by role; only with `explain=roles`")
    error: str | None = Field(None, description="why the image has no answer")


class Classified(BaseModel):
    """The answers of an adapter, one per image."""

    model: str
    version: str
    answers: list[ClassifiedImage]


class Compared(BaseModel):
    """The answers of several adapters."""

    results: list[Classified]


class Match(BaseModel):
    """An image of a gallery and its cosine similarity with the query."""

    key: str = Field(description="name of the image in the gallery")
    similarity: float


class RetrievedImages(BaseModel):
    """The images most like one image, by attribute, or why there are none."""

    image: str = Field(description="name of the file, or `image 1`")
    attributes: dict[str, list[Match]] | None = Field(None, description="most similar first, by attribute")
    error: str | None = Field(None, description="why the image has no answer")


class Retrieved(BaseModel):
    """The answers of an adapter, one per image."""

    gallery: str
    model: str
    version: str
    answers: list[RetrievedImages]


class GalleryList(BaseModel):
    """Names of the stored galleries."""

    galleries: list[str]


class Embedding(BaseModel):
    """Unit features of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="base64: float32, little-endian")


class Usage(BaseModel):
    """Text tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Embeddings in the order of the inputs; of a multipart request first its files, then its texts."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class Problems(BaseModel):
    """Runs that are not served, and why."""

    problems: dict[str, str]


class Unloaded(BaseModel):
    """An adapter that is no longer served."""

    unloaded: str


def request_schemas() -> dict[str, Any]:
    """Components of `/openapi.json`: every request as JSON, and as a form with images as `files`."""
    kinds = (ClassifyOptions, CompareOptions, RetrieveOptions, EmbeddingsOptions)
    _, schemas = msgspec.json.schema_components(kinds)
    binary = {"type": "string", "format": "binary"}
    files = {"files": {"type": "array", "items": binary, "description": "image files"}}
    for kind in kinds:
        fields = {name: one for name, one in schemas[kind.__name__]["properties"].items() if name != "images"}
        schemas[_form_name(kind)] = {"type": "object", "properties": files | fields}
    return schemas


def request_body(kind: type[Options], *parameters: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI description of a request, as JSON and as a form, with parameters of its address."""
    names = {"application/json": kind.__name__, "multipart/form-data": _form_name(kind)}
    content = {how: {"schema": {"$ref": f"#/components/schemas/{name}"}} for how, name in names.items()}
    return {"parameters": list(parameters), "requestBody": {"required": True, "content": content}}


def _form_name(kind: type[Options]) -> str:
    return f"{kind.__name__}Form"
