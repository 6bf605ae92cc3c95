// Requests to this server. The token is taken from the address once and kept for this tab.
export const TOKEN = /[#&]token=([^&]+)/;
const given = TOKEN.exec(location.hash);
if (given) {
  sessionStorage.setItem("token", decodeURIComponent(given[1]));
  history.replaceState(null, "", location.pathname + "#/");
}

export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function request(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let response;
  try { response = await fetch(path, { ...options, headers, cache: "no-store" }); }
  catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The board's server does not answer. Start it again; the runs are not affected.");
  }
  if (response.ok) return response;
  let message = response.statusText;
  try { message = (await response.json()).error.message; } catch { /* not JSON: the status says it */ }
  throw new ApiError(response.status, message);
}

export const query = values => new URLSearchParams(Object.entries(values).filter(([, v]) => v !== "" && v !== null && v !== undefined)).toString();
export const get = async (name, values = {}, signal) => (await request(`/api/${name}?${query(values)}`, { signal })).json();
export const getBlob = async (name, values = {}) => (await request(`/api/${name}?${query(values)}`)).blob();
export const post = async (name, body) => (await request(`/api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json();
export const setToken = token => sessionStorage.setItem("token", token);
