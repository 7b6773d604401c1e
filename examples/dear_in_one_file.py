"""DeAR in one file: plain PyTorch on top of transformers' CLIPModel, to be read from top to bottom.

Y. Ma et al., "DeAR: Fine-Grained VLM Adaptation by Decomposing Attention Head Roles", CVPR 2026. CLIP stays
frozen. Five learned *attribute tokens* (color, shape, texture, object, location) join the image tokens in the
last layers. Which attention head may read which token depends on the *role* of the head, and roles are found
before training and read from a file. K learned tokens join the words of each class prompt in the same way.
The class token and every attribute token then vote for a class, with learned weights.

    pip install torch transformers pillow
    dear roles discover --rule table2 --out roles.json    # the paper's roles of the heads of ViT-B/16
    python dear_in_one_file.py photos/train photos/test --roles roles.json

photos/train and photos/test contain one folder of images per class, named after the class. All numbers are
the paper's (supplement A), without its mixed precision. There is no optimization for speed here: the package
`dear` computes the same losses much faster, and a test holds the two together.

Tensors carry their shape in the name:
    B images    N tokens of an image: class token and patches    A attribute tokens    T = N + A
    C classes   W tokens of a prompt   K learned text tokens      H heads of width d, D = H d
    E width of the joint space of images and texts                S side of an image in pixels
"""

import argparse
import json
import math
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import CLIPModel, CLIPTokenizer

BETA = 0.9  # weight of a raw token against what the layer before made of it (eq. 5, 6)
TEXT_TOKENS = 5  # K
LAMBDA_REG, LAMBDA_FUSION = 1.0, 0.7  # weights of the losses (eq. 12)
EPOCHS, BATCH, LEARNING_RATE, WARMUP_RATE, WEIGHT_DECAY = 10, 16, 1e-3, 1e-5, 5e-4
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's pixels

# ---- roles and masks: who may read whom -------------------------------------------------------------------


def read_roles(path):
    """The attributes that get a token, and {(layer, head): (kind, concept)}; layers count from 1."""
    file = json.loads(Path(path).read_text(encoding="utf-8"))
    return file["core"], {(row["layer"], row["head"]): (row["kind"], row["concept"]) for row in file["roles"]}


def role_mask(kind, concept, attributes, N):
    """What eq. 7 adds to the scores of one head: 0 where query i may read key j, -inf where it may not."""
    mask_TT = torch.zeros(N + len(attributes), N + len(attributes))
    if kind in ("generalization", "other"):  # eq. 8: image tokens and attribute tokens ignore each other
        mask_TT[:N, N:] = -torch.inf
        mask_TT[N:, :N] = -torch.inf
    elif kind == "core":  # eq. 9: of all attribute tokens only the head's own can be read, by every query
        mask_TT[:, N:] = -torch.inf
        mask_TT[:, N + attributes.index(concept)] = 0.0
    return mask_TT  # a mixed head reads everything


# ---- the transformer: CLIP's own weights, the obvious attention -------------------------------------------


def attention(attn, x_BTD, mask):
    """Multi-head attention (eq. 1) with a mask [H, T, T] or [T, T] that is added to the scores (eq. 7)."""
    B, T, D = x_BTD.shape
    H, d = attn.num_heads, D // attn.num_heads
    q_BHTd = attn.q_proj(x_BTD).view(B, T, H, d).transpose(1, 2)
    k_BHTd = attn.k_proj(x_BTD).view(B, T, H, d).transpose(1, 2)
    v_BHTd = attn.v_proj(x_BTD).view(B, T, H, d).transpose(1, 2)
    scores_BHTT = q_BHTd @ k_BHTd.transpose(-2, -1) / math.sqrt(d)
    weights_BHTT = (scores_BHTT + mask).softmax(dim=-1)
    heads_BTD = (weights_BHTT @ v_BHTd).transpose(1, 2).reshape(B, T, D)
    return attn.out_proj(heads_BTD)


def transformer_layer(layer, x_BTD, mask):
    """One of CLIP's layers, with our mask."""
    x_BTD = x_BTD + attention(layer.self_attn, layer.layer_norm1(x_BTD), mask)
    return x_BTD + layer.mlp(layer.layer_norm2(x_BTD))


def add_tokens(x_BTD, raw_AD, at):
    """The learned tokens enter the sequence at position `at`: this is layer J."""
    return torch.cat([x_BTD[:, :at], raw_AD.expand(len(x_BTD), -1, -1), x_BTD[:, at:]], dim=1)


def anchor_tokens(x_BTD, raw_AD, at):
    """Every later layer reads them as a mix of the raw token and the layer before (eq. 5, 6)."""
    end = at + len(raw_AD)
    mixed_BAD = BETA * raw_AD + (1 - BETA) * x_BTD[:, at:end]
    return torch.cat([x_BTD[:, :at], mixed_BAD, x_BTD[:, end:]], dim=1)


def first_layer(layers):
    """J: learned tokens enter in the last third of the layers, at layer 9 of 12."""
    return len(layers) - max(1, round(len(layers) / 3)) + 1


# ---- the method -------------------------------------------------------------------------------------------


class DeAR(nn.Module):
    """A frozen CLIP, and all that is learned: 399,622 parameters for ViT-B/16."""

    def __init__(self, clip, ids_CW, attributes, roles):
        super().__init__()
        self.clip = clip.requires_grad_(False).eval()
        vision, text = clip.config.vision_config, clip.config.text_config
        self.r_AD = nn.Parameter(0.02 * torch.randn(len(attributes), vision.hidden_size))
        self.text_KD = nn.Parameter(0.02 * torch.randn(TEXT_TOKENS, text.hidden_size))
        self.P_attr_DE = nn.Parameter(clip.visual_projection.weight.detach().T.clone())  # starts as P_v
        self.v = nn.Parameter(torch.zeros(1 + len(attributes)))  # class token first

        self.N = (vision.image_size // vision.patch_size) ** 2 + 1
        for layer in range(first_layer(clip.vision_model.encoder.layers), vision.num_hidden_layers + 1):
            heads = [roles[layer, head] for head in range(vision.num_attention_heads)]
            mask_HTT = torch.stack([role_mask(*role, attributes, self.N) for role in heads])
            self.register_buffer(f"mask_{layer}", mask_HTT, persistent=False)
        self.register_buffer("ids_CW", ids_CW, persistent=False)
        with torch.no_grad():
            self.register_buffer("w_frozen_CE", self.encode_text(adapted=False), persistent=False)

    def encode_image(self, pixels_B3SS, adapted=True):
        """Unit features of the class token [B, E] and of the attribute tokens [B, A, E]."""
        tower, N = self.clip.vision_model, self.N
        x_BTD = tower.pre_layrnorm(tower.embeddings(pixels_B3SS))  # T = N so far
        J = first_layer(tower.encoder.layers)
        for number, layer in enumerate(tower.encoder.layers, start=1):
            mask = 0.0
            if adapted and number >= J:
                x_BTD = (add_tokens if number == J else anchor_tokens)(x_BTD, self.r_AD, at=N)
                mask = getattr(self, f"mask_{number}")
            x_BTD = transformer_layer(layer, x_BTD, mask)
        x_BTD = tower.post_layernorm(x_BTD)
        f_cls_BE = self.clip.visual_projection(x_BTD[:, 0])  # eq. 10, P_v is frozen
        f_attr_BAE = x_BTD[:, N:] @ self.P_attr_DE  # eq. 11, P_attr is learned
        return F.normalize(f_cls_BE, dim=-1), F.normalize(f_attr_BAE, dim=-1)

    def encode_text(self, adapted=True):
        """Unit features of the class prompts [C, E]; the tokens enter between BOT and the words."""
        tower = self.clip.text_model
        x_CWD = tower.embeddings(self.ids_CW)
        end_C = self.ids_CW.argmax(dim=-1)  # EOT has the largest id
        J = first_layer(tower.encoder.layers)
        for number, layer in enumerate(tower.encoder.layers, start=1):
            if adapted and number >= J:
                x_CWD = (add_tokens if number == J else anchor_tokens)(x_CWD, self.text_KD, at=1)
            W = x_CWD.shape[1]
            causal_WW = torch.full((W, W), -torch.inf, device=x_CWD.device).triu(diagonal=1)
            x_CWD = transformer_layer(layer, x_CWD, causal_WW)
        end_C = end_C + (TEXT_TOKENS if adapted else 0)
        eot_CD = tower.final_layer_norm(x_CWD)[torch.arange(len(end_C)), end_C]
        return F.normalize(self.clip.text_projection(eot_CD), dim=-1)

    def logits(self, f_cls_BE, f_attr_BAE, w_CE):
        """Task-adaptive fusion: the weighted votes of the class token and of each attribute."""
        tau = self.clip.logit_scale.exp()
        s_cls_BC = tau * f_cls_BE @ w_CE.T  # eq. 17
        s_attr_BAC = tau * f_attr_BAE @ w_CE.T  # eq. 18
        alpha = self.v.softmax(dim=0)
        return alpha[0] * s_cls_BC + (alpha[1:, None] * s_attr_BAC).sum(dim=1)  # eq. 19

    def loss(self, pixels_B3SS, labels_B):
        """Cross-entropy plus what keeps the model close to the frozen CLIP (eq. 12)."""
        f_cls_BE, f_attr_BAE = self.encode_image(pixels_B3SS)
        w_CE = self.encode_text()
        with torch.no_grad():
            f_frozen_BE, _ = self.encode_image(pixels_B3SS, adapted=False)
        loss_ce = F.cross_entropy(self.logits(f_cls_BE, f_attr_BAE, w_CE), labels_B)
        loss_img = (1 - (f_cls_BE * f_frozen_BE).sum(dim=-1)).mean()  # eq. 14
        loss_txt = (1 - (w_CE * self.w_frozen_CE).sum(dim=-1)).mean()  # eq. 15
        loss_fusion = -self.v.log_softmax(dim=0)[0]  # eq. 16: -log alpha_cls
        return loss_ce + LAMBDA_REG * (loss_img + loss_txt) + LAMBDA_FUSION * loss_fusion  # eq. 12, 13

    @torch.no_grad()
    def predict(self, pixels_B3SS):
        """Scores [B, C] by all votes (fused), and by the class token alone (decoupled)."""
        f_cls_BE, f_attr_BAE = self.encode_image(pixels_B3SS)
        w_CE = self.encode_text()
        return self.logits(f_cls_BE, f_attr_BAE, w_CE), f_cls_BE @ w_CE.T


# ---- images and training ----------------------------------------------------------------------------------


class Photos(torch.utils.data.Dataset):
    """The images of a folder with one folder per class, as (pixels [3, S, S], label)."""

    def __init__(self, folder, classes, size, augment):
        self.size, self.augment = size, augment
        files = [(file, label) for label, name in enumerate(classes) for file in Path(folder, name).iterdir()]
        readable = Image.registered_extensions()
        self.items = sorted((file, label) for file, label in files if file.suffix.lower() in readable)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        file, label = self.items[index]
        image = Image.open(file).convert("RGB")
        width = height = min(image.size)  # the square in the middle
        left, top = (image.width - width) // 2, (image.height - height) // 2
        if self.augment:  # a random crop of half to all of the area, flipped half of the time
            area = image.width * image.height * random.uniform(0.5, 1.0)
            ratio = (4 / 3) ** random.uniform(-1, 1)
            width = min(image.width, round(math.sqrt(area * ratio)))
            height = min(image.height, round(math.sqrt(area / ratio)))
            left, top = random.randint(0, image.width - width), random.randint(0, image.height - height)
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        box = (left, top, left + width, top + height)
        image = image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        pixels_SS3 = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(*image.size, 3)
        return ((pixels_SS3 / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1), label


def learning_rate(step, steps_per_epoch):
    """One epoch at a constant low rate, then half a cosine down to 0."""
    if step < steps_per_epoch:
        return WARMUP_RATE
    progress = (step - steps_per_epoch) / ((EPOCHS - 1) * steps_per_epoch)
    return 0.5 * LEARNING_RATE * (1 + math.cos(math.pi * progress))


def train(model, batches):
    """Optimize the learned tensors over (pixels, labels) batches; yields the loss of every step."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, weight_decay=WEIGHT_DECAY)
    for epoch in range(EPOCHS):
        for number, (pixels_B3SS, labels_B) in enumerate(batches):
            optimizer.param_groups[0]["lr"] = learning_rate(epoch * len(batches) + number, len(batches))
            loss = model.loss(pixels_B3SS.to(model.v.device), labels_B.to(model.v.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()


def main():
    """Train on one folder, report accuracy on another, and save the learned tensors."""
    parser = argparse.ArgumentParser(description="Adapt CLIP to a folder of class folders with DeAR.")
    parser.add_argument("train", help="folder with one folder of images per class")
    parser.add_argument("test", help="the same classes, images to measure accuracy on")
    parser.add_argument("--roles", default="roles.json", help="roles of the heads of this backbone")
    parser.add_argument("--backbone", default="openai/clip-vit-base-patch16")
    parser.add_argument("--template", default="a photo of a {}.")
    parser.add_argument("--out", default="dear.pt", help="where the learned tensors go")
    options = parser.parse_args()
    random.seed(1)
    torch.manual_seed(1)

    clip = CLIPModel.from_pretrained(options.backbone).float()
    tokenizer = CLIPTokenizer.from_pretrained(options.backbone)
    classes = sorted(path.name for path in Path(options.train).iterdir() if path.is_dir())
    prompts = [options.template.format(name.replace("_", " ")) for name in classes]
    ids_CW = tokenizer(prompts, padding=True, return_tensors="pt").input_ids
    model = DeAR(clip, ids_CW, *read_roles(options.roles)).to("cuda" if torch.cuda.is_available() else "cpu")

    size = clip.config.vision_config.image_size
    photos = Photos(options.train, classes, size, augment=True)
    test = Photos(options.test, classes, size, augment=False)
    batches = torch.utils.data.DataLoader(photos, BATCH, shuffle=True)
    for step, loss in enumerate(train(model, batches), start=1):
        print(f"step {step} of {EPOCHS * len(batches)}: loss {loss:.4f}")
    hits = torch.zeros(2)
    for pixels_B3SS, labels_B in torch.utils.data.DataLoader(test, 250):
        scores = model.predict(pixels_B3SS.to(model.v.device))
        hits += torch.tensor([(s.argmax(dim=-1).cpu() == labels_B).sum() for s in scores])
    fused, decoupled = (hits / len(test)).tolist()
    print(f"accuracy on {len(test)} images: {fused:.1%} fused, {decoupled:.1%} by the class token alone")
    state = model.state_dict()
    torch.save({name: state[name] for name in state if not name.startswith("clip.")}, options.out)


if __name__ == "__main__":
    main()
