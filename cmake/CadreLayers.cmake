# The suffix of a source says what it is: x.cpp belongs to the library, x_test.cpp is a test,
# x_bench.cpp a benchmark, x_fuzz.cpp a fuzz target.

# cadre_sources(OUT kind folder...): the sources of a kind (library, test, bench or fuzz) in the
# folders.
function(cadre_sources out kind)
  set(found "")
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
    list(APPEND found ${files})
  endforeach()
  if(kind STREQUAL "library")
    list(FILTER found EXCLUDE REGEX "_(test|bench|fuzz|main)\\.cpp$")
  else()
    list(FILTER found INCLUDE REGEX "_${kind}\\.cpp$")
  endif()
  set(${out} ${found} PARENT_SCOPE)
endfunction()

# cadre_test_name(OUT folder): the name of a folder's tests: "base" for core/base, "launch" for
# launch/job, "testing" for testing/core.
function(cadre_test_name out folder)
  string(REGEX REPLACE "^.*/" "" name ${folder})
  if(name STREQUAL "job" OR folder MATCHES "^testing/")
    string(REGEX REPLACE "/.*$" "" name ${folder})
  endif()
  set(${out} ${name} PARENT_SCOPE)
endfunction()

# Appends to OUT every header of the source tree that `header` includes, itself first. A topic
# header, such as cadre/ddp.h, is in include/.
function(cadre_reachable_headers header out)
  set(found ${${out}})
  if(EXISTS ${CMAKE_SOURCE_DIR}/include/${header})
    string(PREPEND header include/)
  endif()
  if(header IN_LIST found OR NOT EXISTS ${CMAKE_SOURCE_DIR}/${header})
    return()
  endif()
  list(APPEND found ${header})
  file(STRINGS ${CMAKE_SOURCE_DIR}/${header} lines REGEX "^#include [\"<]cadre/")
  set(reached ${found})
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^#include [\"<]([^\">]+)[\">].*" "\\1" included "${line}")
    cadre_reachable_headers(${included} reached)
  endforeach()
  set(${out} ${reached} PARENT_SCOPE)
endfunction()

# cadre_reaches(OUT file regex): whether a line of the source `file`, or of a header that it
# includes directly or not, matches.
function(cadre_reaches out file regex)
  cmake_path(RELATIVE_PATH file BASE_DIRECTORY ${CMAKE_SOURCE_DIR})
  set(reached "")
  cadre_reachable_headers(${file} reached)
  foreach(header IN LISTS reached)
    file(STRINGS ${CMAKE_SOURCE_DIR}/${header} matching REGEX "${regex}" LIMIT_COUNT 1)
    if(matching)
      set(${out} TRUE PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${out} FALSE PARENT_SCOPE)
endfunction()
