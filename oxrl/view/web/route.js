// Addresses of the views: #/run/0/step/12/group/3/answer/1?colour=ratio. Each can be copied, and goes back in the browser.

const PARTS = { run: whole, step: whole, group: String, answer: String, prompt: String };

/** A number where the text is one, else the text: views say that there is no such step. */
function whole(text) {
  return /^\d{1,12}$/.test(text) ? Number(text) : text;
}

/** {view, run, step, group, answer, prompt, query} of the address. */
function currentRoute() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const words = path.split("/").filter(Boolean);
  const route = { view: "run", run: 0, query: new URLSearchParams(search) };
  for (let at = 0; at + 1 < words.length; at += 2) {
    const [name, value] = [words[at], safelyDecoded(words[at + 1])];
    if (!(name in PARTS)) continue;
    route[name] = PARTS[name](value);
    if (name !== "run") route.view = name;
  }
  return route;
}

function safelyDecoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** href({run: 0, step: 12}, {q: "text"}): the address of a view. */
function href(parts, query = {}) {
  const path = Object.keys(PARTS).filter((name) => parts[name] !== undefined && parts[name] !== null);
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== ""));
  const text = search.toString();
  return `#/${path.map((name) => `${name}/${encoded(parts[name])}`).join("/")}${text ? `?${text}` : ""}`;
}

function go(address) {
  location.hash = address;
}

/** Keep a choice of the user in the address, without a new entry in the history. */
function remember(name, value) {
  const route = currentRoute();
  if (value === null || value === "") route.query.delete(name);
  else route.query.set(name, value);
  const [path] = location.hash.split("?");
  const text = route.query.toString();
  history.replaceState(null, "", `${path || "#/"}${text ? `?${text}` : ""}`);
}
