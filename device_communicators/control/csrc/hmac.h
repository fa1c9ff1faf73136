// HMAC-SHA256 (RFC 2104, FIPS 180-4).
#pragma once

#include <string>
#include <string_view>

namespace parallel_state::control {

std::string sha256(std::string_view message);
std::string hmac_sha256(std::string_view key, std::string_view message);
// Constant time.
bool equal_secrets(std::string_view one, std::string_view other);

}  // namespace parallel_state::control
