# `make install`: the command, the trainer, the two libraries, the public headers and a CMake package.
# The public headers are what <cadre/core.h> and <cadre/cadre.h> include, directly or not.
include(CMakePackageConfigHelpers)

# Appends to OUT every header of the source tree that `header` includes, itself first.
function(cadre_reachable_headers header out)
  set(found ${${out}})
  if(header IN_LIST found OR NOT EXISTS ${CMAKE_SOURCE_DIR}/${header})
    return()
  endif()
  list(APPEND found ${header})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${header})
  file(STRINGS ${CMAKE_SOURCE_DIR}/${header} lines REGEX "^#include [\"<]cadre/")
  set(reached ${found})
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^#include [\"<]([^\">]+)[\">].*" "\\1" included "${line}")
    cadre_reachable_headers(${included} reached)
  endforeach()
  set(${out} ${reached} PARENT_SCOPE)
endfunction()

set(public_headers "")
cadre_reachable_headers(cadre/core.h public_headers)
cadre_reachable_headers(cadre/cadre.h public_headers)
foreach(header IN LISTS public_headers)
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES ${CMAKE_SOURCE_DIR}/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder})
endforeach()

install(TARGETS cadre_core EXPORT CadreTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET cadre)
  # The wheel stays where it is; our own libraries are found relative to the program.
  set_target_properties(cadre PROPERTIES INSTALL_RPATH "$ORIGIN;${LibTorch_DIR}/lib")
  install(TARGETS cadre EXPORT CadreTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET cadre_command)
  install(TARGETS cadre_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
if(TARGET cadre_train)
  set_target_properties(
    cadre_train PROPERTIES INSTALL_RPATH
                           "$ORIGIN/../../${CMAKE_INSTALL_LIBDIR};${LibTorch_DIR}/lib")
  install(TARGETS cadre_train RUNTIME DESTINATION libexec/cadre)
endif()

install(EXPORT CadreTargets NAMESPACE Cadre:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Cadre)
configure_package_config_file(
  ${CMAKE_SOURCE_DIR}/cmake/CadreConfig.cmake.in ${CMAKE_BINARY_DIR}/CadreConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Cadre)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/CadreConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/CadreConfig.cmake ${CMAKE_BINARY_DIR}/CadreConfigVersion.cmake
              ${CMAKE_SOURCE_DIR}/cmake/FindLibTorch.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Cadre)
